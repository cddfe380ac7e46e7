"use strict";
/* Draws a document of facts: a report, a result in a notebook, what checkpoints hold.

   rankxformPage(facts, root) adds to `root` what `facts` has, and nothing else:
   docs/page.schema.json says what that can be. Nothing is computed here but lengths on the screen.
   All text is set as text, never as HTML. */
const rankxformPage = (() => {
  const HTML = "http://www.w3.org/1999/xhtml", SVG = "http://www.w3.org/2000/svg";
  const HUES = 8; // classes h0 to h7: the colours of Okabe and Ito, told apart by the colour-blind
  const CHARACTER = 6.4; // width of a character of small text, in pixels
  const MOST_ROWS = 200; // of a table that can be long
  const MOST_DRAWN = 16; // boxes of a tensor

  // -- elements ------------------------------------------------------------------------------

  function make(space, tag, attributes, children) {
    const made = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== ""));
    return made;
  }
  const h = (tag, attributes = {}, ...children) => make(HTML, tag, attributes, children);
  const s = (tag, attributes = {}, ...children) => make(SVG, tag, attributes, children);

  const number = (value) => value.toLocaleString("en-US");
  const count = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;

  /* As rankxform.display.units writes it; a test compares them. */
  function size(nbytes) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let exponent = 0;
    for (; nbytes >= 999.5 && exponent < units.length - 1; exponent++) nbytes /= 1000;
    return `${exponent ? Number(nbytes.toPrecision(3)) : nbytes.toFixed(0)} ${units[exponent]}`;
  }
  function seconds(value) {
    if (value > 0 && value < 0.001) return `${(value * 1e6).toFixed(0)} us`;
    if (value > 0 && value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
    if (value < 60) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
    const minutes = Math.floor(value / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(value) % 60} s`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  /* A table that scrolls by itself; cells that are numbers stand to the right. */
  function table(head, rows, total = rows.length) {
    const cell = (tag) => (value) =>
      typeof value === "number"
        ? h(tag, { class: "n" }, number(value))
        : h(tag, {}, value ?? "");
    const top = head.length ? [h("tr", {}, head.map(cell("th")))] : [];
    const body = rows.slice(0, MOST_ROWS).map((row) => h("tr", {}, row.map(cell("td"))));
    const more = total - body.length;
    return h("div", { class: "scroll", tabindex: 0 }, h("table", {}, top, body),
      more > 0 ? h("p", { class: "faint" }, `and ${number(more)} more`) : null);
  }
  const folded = (title, ...content) => h("details", {}, h("summary", {}, title), content);

  /* Filled when it is first opened: there may be very many. */
  function later(title, content) {
    const made = h("details", {}, h("summary", {}, title));
    made.addEventListener("toggle", () => made.open && made.children.length === 1 && made.append(...content()));
    return made;
  }
  function section(title, ...content) {
    return h("section", {}, h("h2", {}, title), content);
  }
  function drawing(width, height, title, parts) {
    const place = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title };
    return h("div", { class: "scroll", tabindex: 0 }, s("svg", place, s("title", {}, title), parts));
  }
  function rect(x, y, width, height, kind, tip, opacity = 1) {
    const place = { x: x.toFixed(1), y: y.toFixed(1), width: width.toFixed(1), height: height.toFixed(1) };
    return s("rect", { ...place, class: kind, "fill-opacity": opacity.toFixed(2) }, tip ? s("title", {}, tip) : "");
  }
  const text = (x, y, words, kind, anchor = "start") =>
    s("text", { x: x.toFixed(1), y: y.toFixed(1), class: kind, "text-anchor": anchor }, words);

  // -- what is drawn -------------------------------------------------------------------------

  const arrows = (words) => words.replaceAll("->", "\u2192");
  function head(one) {
    const rows = one.amounts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
    return h("header", {}, one.title ? h("h1", {}, arrows(one.title)) : null,
      h("p", {}, h("span", { class: "big" }, arrows(one.what)), " ", h("span", { class: `state ${one.state}` }, arrows(one.told))),
      h("dl", {}, rows));
  }
  const warnings = (texts) => texts.map((one) => h("p", { class: "warn" }, one));

  /* The stages of pipelines, each as wide as it has layers. */
  function layers(sides) {
    const rows = sides.map((side) => h("div", { class: "stages" }, h("span", { class: "side" }, side.name),
      side.stages.map((stage, at) => h("span", { class: `stage h${at % HUES}`, style: `flex:${Math.max(stage.layers, 1)} 1 0`,
        title: `stage ${at}: layers ${stage.names || "none"} (${stage.layers})` },
        h("b", {}, side.stages.length > 8 ? `${at}` : `stage ${at}`), side.stages.length > 16 ? "" : ` ${stage.names || "-"}`))));
    const all = sides.flatMap((side) => side.stages.map((stage, at) => [side.name, at, stage.names || "-", stage.layers]));
    return [rows, h("p", { class: "faint" }, "Pipeline stages in bold, and the layers that each has."),
      folded("as numbers", table(["", "stage", "layers", "how many"], all))];
  }

  /* Who takes how many bytes from whom: darker is more, and bars are the sums. */
  function matrix(flow) {
    const rows = flow.rows.length, columns = flow.columns.length;
    const longest = (names) => CHARACTER * (Math.max(0, ...names.map((name) => name.length)) + 1);
    const wide = Math.max(12, Math.min(58, 620 / columns)), high = Math.max(12, Math.min(28, 620 / rows));
    const left = 30 + Math.max(longest(flow.rows), CHARACTER * 12), top = several(flow.stages) ? 56 : 36;
    const right = left + columns * wide, bottom = top + rows * high;
    const most = Math.max(1, ...flow.cells.map(([, , nbytes]) => nbytes));
    const parts = [text(left, 12, `from source ${flow.column}`, "small"), text(left - 8, top - 6, `to ${flow.row}`, "small", "end"),
      rect(left, top, columns * wide, rows * high, "none")];
    const every = Math.ceil(longest(flow.columns) / wide);
    flow.columns.forEach((name, at) => at % every || parts.push(text(left + (at + 0.5) * wide, top - 6, name, "small", "middle")));
    flow.rows.forEach((name, at) => parts.push(text(left - 8, top + (at + 0.5) * high + 4, name, "small", "end")));
    for (const [row, column, nbytes] of flow.cells) {
      const x = left + column * wide, y = top + row * high, share = Math.sqrt(nbytes / most);
      const tip = `${flow.row} ${flow.rows[row]} from ${flow.column} ${flow.columns[column]}: ${size(nbytes)}`;
      parts.push(rect(x + 0.5, y + 0.5, wide - 1, high - 1, "cell", tip, 0.12 + 0.88 * share));
      if (wide >= 50 && high >= 16) parts.push(text(x + wide / 2, y + high / 2 + 4, size(nbytes), share > 0.62 ? "small light" : "small strong", "middle"));
    }
    parts.push(stages(flow.stages, (first, many) => [left + first * wide + 1, top - 36, many * wide - 2, 13]));
    parts.push(stages(flow.row_stages, (first, many) => [2, top + first * high + 1, 14, many * high - 2]));
    sums(flow.row_sums, (at, share) => [right + 8, top + at * high + 1, 60 * share, high - 2], parts, high >= 12);
    sums(flow.column_sums, (at, share) => [left + at * wide + 1, bottom + 8, wide - 2, 40 * share], parts, false);
    if (wide >= 50) flow.column_sums.forEach((nbytes, at) => parts.push(text(left + (at + 0.5) * wide, bottom + 62, size(nbytes), "small", "middle")));
    const title = `bytes of each destination ${flow.row} by source ${flow.column}`;
    const cells = flow.cells.map(([row, column, nbytes]) => [flow.rows[row], flow.columns[column], nbytes]);
    return [drawing(right + 140, bottom + 68, title, parts.flat()),
      folded("as numbers", table([`destination ${flow.row}`, `source ${flow.column}`, "bytes"], cells),
        table([`destination ${flow.row}`, "pipeline stage", "bytes"], flow.rows.map((name, at) => [name, flow.row_stages[at] ?? null, flow.row_sums[at]])),
        table([`source ${flow.column}`, "pipeline stage", "bytes"], flow.columns.map((name, at) => [name, flow.stages[at] ?? null, flow.column_sums[at]])))];
  }
  const several = (numbers) => new Set(numbers).size > 1;
  function stages(numbers, place) {
    const parts = [];
    for (let first = 0, at = 1; several(numbers) && at <= numbers.length; at++) {
      if (at < numbers.length && numbers[at] === numbers[first]) continue;
      const [x, y, width, height] = place(first, at - first);
      parts.push(rect(x, y, width, height, `h${numbers[first] % HUES}`, `pipeline stage ${numbers[first]}`));
      const words = width > 50 ? `stage ${numbers[first]}` : `${numbers[first]}`;
      parts.push(text(x + width / 2, y + height / 2 + 3.5, words, "tiny", "middle"));
      first = at;
    }
    return parts;
  }
  function sums(every, place, parts, labelled) {
    const most = Math.max(1, ...every);
    every.forEach((nbytes, at) => {
      const [x, y, width, height] = place(at, nbytes / most);
      parts.push(rect(x, y, width, height, "sum", size(nbytes)));
      if (labelled) parts.push(text(x + width + 4, y + height / 2 + 4, size(nbytes), "small"));
    });
  }

  /* How kinds of tensors are sharded, before and after. */
  function kind(one) {
    const sides = one.sides.map((side) => h("figure", {}, square(one, side), h("figcaption", {}, `${side.name}: ${side.holds}`)));
    const rows = one.sides.flatMap((side) => side.bands.map((band) => [side.name, extents(band), band.slices, band.ranks, band.holders]));
    return h("article", {}, h("h3", {}, one.title),
      h("p", { class: "faint" }, one.about), h("div", { class: "sides" }, sides),
      h("p", {}, arrows(one.change)), folded("as numbers", table(["", "elements", "slices", "ranks", "how many"], rows)));
  }
  function kinds({ drawn, more, same }) {
    const all = (some) => h("div", { class: "two" }, some.map(kind));
    return [h("p", {}, drawn.length ? "Each colour is the first rank that holds a slice." : "Every rank holds the elements that it held before."), all(drawn),
      more.length ? later(count(more.length, "more kind") + " that " + (more.length === 1 ? "changes" : "change"), () => [all(more)]) : null,
      same.length ? folded(count(same.length, "kind") + " as before", list(same)) : null];
  }
  const extents = (band) => band.start.map((start, axis) => `${start}:${band.stop[axis]}`).join(", ") || "one value";
  function square(one, side) {
    const edge = 150, parts = [rect(0, 0, edge, edge, "frame")];
    const [down, across] = one.axes;
    const share = (band, axis) => axis === null || !one.shape[axis] ? [0, edge]
      : [edge * band.start[axis] / one.shape[axis], edge * (band.stop[axis] - band.start[axis]) / one.shape[axis]];
    for (const band of side.bands) {
      const whose = `rank${band.holders > 1 ? "s" : ""} ${band.ranks}`;
      const [y, height] = share(band, down), [x, width] = share(band, across);
      const many = band.slices > 1 ? `, ${count(band.slices, "slice")}` : "";
      parts.push(rect(x, y, width, height, `box h${band.hue % HUES}`, `${whose}${many}: ${extents(band)}`));
      const fits = [`${whose}${many}`, whose, band.ranks].find((words) => width > CHARACTER * (words.length + 1));
      if (fits && height > 13) parts.push(text(x + width / 2, y + height / 2 + 4, fits, "small onbox", "middle"));
    }
    return drawing(edge + 2, edge + 2, `${one.title}, ${one.shape.join(" x ")}, ${side.name}`, parts);
  }

  /* Seconds by phase: a stacked bar for each row. */
  function phases(one) {
    const most = Math.max(1e-9, ...one.rows.map((row) => row.seconds.reduce((sum, value) => sum + value, 0)));
    const bars = one.rows.map((row) => h("div", { class: "stages" }, h("span", { class: "side" }, row.name),
      h("span", { class: "track" }, row.seconds.map((value, at) => h("span", { class: `bar h${at % HUES}${at >= HUES ? " thin" : ""}`,
        style: `width:${(100 * value / most).toFixed(2)}%`, title: `${one.names[at]}: ${seconds(value)}` })))));
    const legend = h("p", { class: "legend" }, one.names.map((name, at) => h("span", {}, h("i", { class: `h${at % HUES}${at >= HUES ? " thin" : ""}` }), ` ${name} `)));
    const rows = one.rows.map((row) => [row.name, ...row.seconds.map((value) => value.toFixed(6))]);
    const axis = h("div", { class: "stages faint" }, h("span", { class: "side" }), h("span", { class: "axis" }, h("span", {}, "0 s"), h("span", {}, seconds(most))));
    return [bars, axis, legend, h("p", { class: "faint" }, "start: until Python and MPI run; index, plan and compare: before the first byte is moved; publish: until files have their names; wait: for other processes, and what is left."), folded("as numbers, in seconds", table(["", ...one.names], rows))];
  }
  function time(one) {
    return [one.told.map((words) => h("p", {}, words)), one.phases ? phases(one.phases) : null];
  }

  const list = (texts) => h("ul", {}, texts.slice(0, MOST_ROWS).map((one) => h("li", {}, h("code", {}, one))),
    texts.length > MOST_ROWS ? h("li", {}, `${number(texts.length - MOST_ROWS)} more`) : null);

  /* What several results say, each once. */
  const told = (results, what) => [...new Set(Object.values(results).flatMap((one) => one[what] ?? []))];
  const known = (results) => told(results, "notices").length ? [section("What to know", list(told(results, "notices")))] : [];
  function different({ verify }) {
    const rows = (verify?.differences ?? []).map((one) => [one.rank ?? one.file, one.tensor, one.text, one.count, one.size, one.index ? one.index.join(", ") : null]);
    return rows.length ? [section("Different", table(["rank or file", "tensor", "why", "elements that differ", "of", "first at"], rows))] : [];
  }
  function notWritten({ plan }) {
    const rows = plan.left_out.map((one) => folded(`${one.why}: ${size(one.nbytes)}`, h("div", { title: one.nbytes }, list(one.names))));
    if (plan.absent.length) rows.push(folded("in the strategies, not in the checkpoint", list(plan.absent)));
    return rows.length ? [section("Not in the destination, and why", rows)] : [];
  }

  /* Whatever a result says, as --json prints it. */
  function tree(value) {
    if (value === null || typeof value !== "object") return h("code", {}, JSON.stringify(value));
    const entries = Object.entries(value);
    if (entries.every(([, one]) => one === null || typeof one !== "object") && Array.isArray(value))
      return h("code", {}, JSON.stringify(value));
    return h("dl", { class: "tree" }, entries.map(([name, one]) => h("div", {}, h("dt", {}, name), h("dd", {}, tree(one)))));
  }

  // -- what checkpoints hold -----------------------------------------------------------------

  /* A search over the tensors of one or two checkpoints; boxes are drawn when one is opened. */
  function browser(checkpoints) {
    const every = checkpoints.map((one) => ({ ...one, where: new Map() })); // by layout, its entries
    const find = h("input", { type: "search", placeholder: "part of a name", "aria-label": "search tensors" });
    const found = h("div", { class: "found" }), said = h("p", { class: "faint", role: "status" });
    const where = every.map((one) => new Map(one.tensors.map((tensor, at) => [tensor[0], at])));
    const names = [...new Set(every.flatMap((one) => one.tensors.map((tensor) => tensor[0])))];
    const show = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      const fit = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
      said.textContent = `${number(fit.length)} of ${count(names.length, "tensor")}` + (fit.length > MOST_ROWS ? `; the first ${MOST_ROWS} are listed` : "");
      found.replaceChildren(...fit.slice(0, MOST_ROWS).map((name) => later(
        [h("code", {}, name), " ", h("span", { class: "faint" }, every.map((one, side) => [side ? " | " : "", where[side].has(name) ? short(one, where[side].get(name)) : "not there"]))],
        () => [h("div", { class: "two" }, every.map((one, side) => where[side].has(name) ? tensor(one, where[side].get(name)) : h("p", {}, `${one.title}: not there`)))])));
    };
    find.addEventListener("input", show);
    show();
    return [h("div", { class: "two" }, every.map((one) => held(one, every.length > 1))), h("p", {}, find), said, found];
  }
  function held(one, titled) {
    return h("article", {}, titled ? [h("h3", {}, one.title), h("p", { class: "faint" }, one.about)] : null, warnings([...one.faults, ...one.warnings]),
      table(["", "tensors", "bytes"], one.kinds), folded("types", table(["type", "tensors", "bytes"], one.types)),
      folded("files", table(["file", "rank", "stage", "bytes"], one.files)));
  }
  const short = (one, at) => {
    const [, type, shape, nbytes] = one.tensors[at];
    const words = `${one.types[type][0]} ${shape.join(" x ") || "one value"}, ${size(nbytes)}`;
    return h("span", { title: `${number(nbytes)} bytes` }, words);
  };
  function tensor(one, at) {
    const [name, , shape, , sharding] = one.tensors[at];
    const { axes, holds } = one.shardings[sharding], boxes = boxesOf(one.shardings[sharding]);
    const ranks = (files) => spread(files).map((file) => one.files[file][1] ?? file);
    const bands = boxes.slice(0, MOST_DRAWN).map(({ start, stop, files }, hue) => {
      const holders = ranks(one.placements[files]);
      return { start, stop, slices: 1, ranks: brief(holders), holders: holders.length, hue };
    });
    const drawn = square({ title: name, shape, axes }, { name: one.title, bands });
    const rows = boxes.flatMap((box) => spread(one.placements[box.files]).map((file) => {
      return [one.files[file][0], one.files[file][1], extents(box), ...placeOf(one, file, at, name + (box.keys?.shift() ?? ""))];
    }));
    return h("article", {}, h("h3", {}, one.title), h("p", {}, holds), drawn,
      boxes.length > MOST_DRAWN ? h("p", { class: "faint" }, `the first ${MOST_DRAWN} of ${number(boxes.length)} boxes are drawn`) : null,
      table(["file", "rank", "elements", "name in the file", "offset", "bytes"], rows));
  }
  /* A sharding's boxes, written out: a grid states its boundaries, and its cells if some lack; others each box. */
  function boxesOf({ edges, cells, boxes, files, keys }) {
    const bounds = edges?.map(spread), placements = spread(files);
    const every = () => bounds.reduce((some, one) => some.flatMap((cell) => one.slice(1).map((_, i) => [...cell, i])), [[]]);
    const ends = edges ? (cells ?? every()).map((cell) => [cell.map((i, axis) => bounds[axis][i]), cell.map((i, axis) => bounds[axis][i + 1])]) : boxes;
    if (ends.length !== placements.length) throw new Error("boxes and placements are not as many");
    return ends.map(([start, stop], at) => ({ start, stop, files: placements[at], keys: keys ? [...keys[at]] : null }));
  }
  /* A tensor's name in a file, and where its content is there. */
  function placeOf(one, file, at, key) {
    const number = one.layout_of[file], layout = one.layouts[number];
    if (!layout) return [key, null, null];
    if (!one.where.has(number)) one.where.set(number, new Map(layout.entries.map((entry, i) => [entry, i])));
    const i = one.where.get(number).get(key === one.tensors[at][0] ? at : key);
    return i === undefined ? [key, null, null] : [key, layout.offsets[i], layout.nbytes[i]];
  }
  /* [first, count, step, ...] as numbers */
  function spread(runs) {
    const numbers = [];
    for (let at = 0; at < runs.length; at += 3)
      for (let i = 0; i < runs[at + 1]; i++) numbers.push(runs[at] + i * runs[at + 2]);
    return numbers;
  }
  const brief = (numbers) => numbers.length > 3 ? `${numbers[0]}, ${numbers[1]} ... ${numbers.at(-1)} (${numbers.length})` : numbers.join(", ");

  // -- all of it -----------------------------------------------------------------------------

  const SECTIONS = {
    head: (one) => [head(one)],
    warnings,
    different: (one) => different(one),
    layers: (one) => [section("Layers by pipeline stage", layers(one))],
    flow: (one) => [section("Who reads from whom", h("p", {}, "Darker is more, and bars are the sums. A slice that several ranks need counts for each of them; of equal copies in the source one is read, chosen to spread the load."), matrix(one))],
    kinds: (one) => [section("How tensors are sharded, before and after", kinds(one))],
    time: (one) => [section("Where the time goes", time(one))],
    nodes: (one) => [section("Between nodes", h("p", {}, "Bytes from one node (columns) to another (rows)."), matrix(one))],
    contents: (every) => [section("Tensors", browser(every))],
    words: (rows) => [section("As the command says it", table([], rows))],
    tables: (every) => every.map((one) => table(one.columns, one.rows, one.total)),
    made: (one) => [section("How this was made", table([], one.rows), h("pre", {}, one.command))],
    results: (one) => [...notWritten(one), ...known(one),
      section("Everything, as --json prints it", Object.entries(one).map(([name, value]) => later(name, () => [tree(value)])))],
  };

  function draw(facts, root) {
    if (facts.results) facts = { warnings: told(facts.results, "warnings"), ...facts, different: facts.results };
    for (const [name, show] of Object.entries(SECTIONS)) if (name in facts) root.append(...show(facts[name]));
  }
  return Object.assign(draw, { size, seconds });
})();
