"""Which pipeline stage holds which parameter.

Networks keep their layers in a numbered list, such as ``model.layers.0.`` to
``model.layers.31.``, which the stages divide among them; what comes before the list is on the first
stage, what comes after it on the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rankxform.errors import RequestError
from rankxform.layout.names import pattern_of, patterns
from rankxform.values import dataclass, pattern_on_use

from .explain import NetworkParameter, Refusals, rule_for
from .rules import FIRST, LAST, SHARED, ShardingRule

_NUMBERED = pattern_on_use(r"\.(\d{1,9})\.")


def places_in_lists(name: str) -> dict[str, int]:
    """Return the numbered lists that a parameter belongs to, outermost first, and its numbers.

    >>> places_in_lists("model.layers.12.experts.3.weight")
    {'model.layers': 12, 'model.layers.12.experts': 3}
    """
    numbers_by_list, position = {}, 0
    while match := _NUMBERED().search(name, position):
        numbers_by_list[name[: match.start()]] = int(match[1])
        position = match.end() - 1
    return numbers_by_list


def lists_of(names: Iterable[str], *, outermost: bool = False) -> dict[str, set[int]]:
    """Return the numbers in each numbered list of the names."""
    numbers_by_list: dict[str, set[int]] = {}
    for name in names:
        for prefix, number in places_in_lists(name).items():
            numbers_by_list.setdefault(prefix, set()).add(number)
            if outermost:
                break
    return numbers_by_list


def homogeneous(names: Iterable[str]) -> set[str]:
    """Return the outermost numbered lists whose items have a parameter in common: layers.

    >>> homogeneous(["h.0.w", "h.0.b", "h.1.w", "net.0.table", "net.1.gamma"])
    {'h'}
    """
    items: dict[str, dict[int, set[str]]] = {}
    for name in names:
        for prefix, number in places_in_lists(name).items():
            suffix = name[len(f"{prefix}.{number}.") :]
            items.setdefault(prefix, {}).setdefault(number, set()).add(suffix)
            break
    return {p for p, n in items.items() if set.intersection(*n.values())}


def in_layers(names: Iterable[str]) -> set[str]:
    """Return the names of parameters in layers: of homogeneous lists, or one of several alike."""
    all_names = list(names)
    layers = tuple(f"{prefix}." for prefix in homogeneous(all_names))
    count = Counter(map(pattern_of, all_names))
    return {name for name in all_names if name.startswith(layers) or count[pattern_of(name)] > 1}


def spread_layers(
    layers: int,
    stages: int,
    *,
    offset: Sequence[int] = (),
    interleave: int = 1,
    counts: Sequence[int] = (),
) -> list[int]:
    """Return the stage of each layer, as MindFormers assigns them. Raises RequestError.

    Each of `interleave` rounds gives every stage the same number of layers, and `offset` more: one
    number for each stage, or for each round and stage. `counts` are the layers of each stage, in
    place of these.

    >>> spread_layers(7, 3, offset=[0, 1, 0])
    [0, 0, 1, 1, 1, 2, 2]
    """
    if counts and min(counts) < 0:
        raise RequestError(f"--layers-per-stage {_text(counts)} has a negative number")
    if counts:
        if len(counts) != stages or sum(counts) != layers:
            raise RequestError(
                f"--layers-per-stage {_text(counts)} is {sum(counts)} layers on {len(counts)} "
                f"stages; the network has {layers}, and there are {stages} stages"
            )
        return [stage for stage, count in enumerate(counts) for _ in range(count)]
    parts = stages * interleave
    if interleave < 1 or parts > max(layers, stages):
        rounds = f"{interleave} rounds"
        raise RequestError(f"{layers} layers do not spread over {stages} stages in {rounds}")
    extra_layers = list(offset) or [0] * parts
    if len(extra_layers) != parts:
        raise RequestError(
            f"offset {_text(offset)} has {len(extra_layers)} numbers; expected one for each of "
            f"{stages} "
            f"stages" + (f", or for each of {interleave} rounds of them" if interleave > 1 else "")
        )
    layer_counts = [layers // parts + extra for extra in extra_layers]
    if min(layer_counts) < 0 or sum(layer_counts) != layers:
        raise RequestError(
            f"{layers} layers do not spread over {stages} stages"
            + (f" in {interleave} rounds" if interleave > 1 else "")
            + f" as {_text(layer_counts)}, which is {sum(layer_counts)} layers"
        )
    return [part % stages for part, count in enumerate(layer_counts) for _ in range(count)]


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True)
class StageLayers:
    """What the user says of the pipeline."""

    layers: str | None = None  # the numbered list that the stages divide, such as ``model.layers``
    # Layers of each stage; or offset and interleave, as MindFormers has them.
    counts: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    interleave: int = 1
    # Whether a configuration says these, so that the source's stages are no guide.
    from_config: bool = False
    # Rules of the user's own that say the stage of parameters outside the list.
    placed: tuple[ShardingRule, ...] = ()

    def of(self, name: str) -> str | None:
        """Return where the user puts a parameter, or None."""
        rule = rule_for(self.placed, name, "stage")
        return rule.stage if rule else None

    @property
    def says_counts(self) -> bool:
        """Whether it is said how many layers a stage has; the source's stages are no guide then."""
        return bool(self.counts or self.offset or self.interleave > 1 or self.from_config)


def assign_stages(
    places: StageLayers,
    parameters: Mapping[str, NetworkParameter],
    rules: Sequence[ShardingRule],
    stages: int,
    refusals: Refusals,
) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter; what is not known is refused."""
    src_stage_count = (
        max((stage for parameter in parameters.values() for stage in parameter.stages), default=0)
        + 1
    )
    first: tuple[int, ...] = (0,)
    nowhere = dict.fromkeys(parameters, first)
    if stages == 1:
        if len(places.counts) > 1:
            refusals.add("--layers-per-stage lists several stages, the job has one", "Leave it out")
        return nowhere
    if stages == src_stage_count and not places.says_counts:
        moved = {name: _stages_of(places.of(name), stages) for name in parameters}
        return {name: moved[name] or parameter.stages for name, parameter in parameters.items()}
    divided = _list(places, parameters, src_stage_count, refusals)
    if divided is None:
        return nowhere
    lists = lists_of(parameters)
    over = _stages_of_lists(parameters)
    numbers = sorted(lists[divided])
    if numbers != list(range(len(numbers))):
        refusals.add(
            f"{divided} has layers {numbers[0]} to {numbers[-1]}, but some from 0 on are missing",
            "Bring the whole checkpoint or strategy, or choose another list in a rules file",
        )
        return nowhere
    try:
        stage_of = spread_layers(
            len(numbers), stages, counts=places.counts, offset=places.offset,
            interleave=places.interleave,
        )  # fmt: skip
    except RequestError as error:
        refusals.add(
            str(error), "Give --layers-per-stage, or `offset` in a rules file, as the job has it"
        )
        return nowhere
    stages_by_name: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        numbered = places_in_lists(name)
        if divided in numbered:
            stages_by_name[name] = (stage_of[numbered[divided]],)
            continue
        is_in_split_list = any(len(over[prefix]) > 1 for prefix in numbered)
        rule = rule_for(rules, name, "stage")
        where = places.of(name) or (rule.stage if rule else None)
        stages_by_name[name] = _outside(
            where, name, parameter, src_stage_count, stages, refusals, is_in_split_list
        )
    for stage in sorted(set(range(stages)).difference(*stages_by_name.values())):
        refusals.add(
            f"pipeline stage {stage} would hold no parameter",
            "Give --layers-per-stage, or fewer stages",
        )
    return stages_by_name


def _stages_of(where: str | None, stages: int) -> tuple[int, ...]:
    stages_by_word = {FIRST: (0,), LAST: (stages - 1,), SHARED: (0, stages - 1)}
    return stages_by_word.get(where or "", ())


def _stages_of_lists(parameters: Mapping[str, NetworkParameter]) -> dict[str, set[int]]:
    stages_by_list: dict[str, set[int]] = {}
    for name, parameter in parameters.items():
        for prefix in places_in_lists(name):
            stages_by_list.setdefault(prefix, set()).update(parameter.stages)
    return stages_by_list


def _list(
    places: StageLayers,
    parameters: Mapping[str, NetworkParameter],
    src_stage_count: int,
    refusals: Refusals,
) -> str | None:
    """Return the numbered list that the pipeline divides; None if it is refused."""
    lists = lists_of(parameters)
    if places.layers is not None:
        if places.layers in lists:
            return places.layers
        candidates = []
    elif src_stage_count > 1:
        over = _stages_of_lists(parameters)
        candidates = [name for name, list_stages in over.items() if len(list_stages) > 1]
    else:
        candidates = _like_layers(parameters, lists)
    if len(candidates) == 1:
        return candidates[0]
    lists_text = " or ".join(patterns(lists)) or "none"
    refusals.add(
        "which numbered list of layers the pipeline stages divide is not known (there is "
        f"{lists_text})",
        "Say it in a rules file (--preset FILE.toml): [preset] layers = 'model.layers'",
    )
    return None


def _like_layers(
    parameters: Mapping[str, NetworkParameter], lists: Mapping[str, set[int]]
) -> list[str]:
    """Return the lists that may be the network's layers.

    A list within the items of another counts only if these have no parameter in common, as the
    items of a container of unlike cells.
    """
    layer_lists = homogeneous(parameters)
    outermost = list(lists_of(parameters, outermost=True))
    unlike = tuple(f"{name}." for name in outermost if name not in layer_lists)
    return outermost + [name for name in lists if name.startswith(unlike)]


def _outside(
    where: str | None,
    name: str,
    parameter: NetworkParameter,
    src_stage_count: int,
    stages: int,
    refusals: Refusals,
    is_in_split_list: bool,
) -> tuple[int, ...]:
    """Return the stages of a parameter that is not in the list.

    where: what the user or a rule says. is_in_split_list: whether it is in another list that
    several stages of the source divide.
    """
    if where is None and is_in_split_list:
        refusals.add(
            "several pipeline stages divide another list, too",
            "Give a rule with stage = 'first' or 'last' where that is right (--preset FILE.toml), "
            "or compile the strategy",
            name,
        )
        return (0,)
    if where is None and src_stage_count > 1:
        words_by_stages = {
            (0,): FIRST,
            (src_stage_count - 1,): LAST,
            (0, src_stage_count - 1): SHARED,
        }
        where = words_by_stages.get(parameter.stages)
    dst_stages = _stages_of(where, stages)
    if dst_stages:
        return dst_stages
    refusals.add(
        "its pipeline stage is not known",
        "Give a rule with stage = 'first', 'last', or 'shared' if both have it (--preset "
        "FILE.toml)",
        name,
    )
    return (0,)
