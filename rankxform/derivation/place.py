"""Find the pipeline stages that hold each parameter at the destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankxform.errors import RequestError
from rankxform.layout.names import patterns
from rankxform.values import dataclass

from .explain import NetworkParameter, Refusals, rule_for
from .pipeline import homogeneous, lists_of, places_in_lists, spread_layers
from .rules import FIRST, LAST, SHARED, ShardingRule


@dataclass(frozen=True)
class StageLayers:
    """What the user says of the pipeline.

    layers: the numbered list that the stages divide, such as ``model.layers``. counts: layers of
    each stage; or offset and interleave, as MindFormers has them. from_config: whether a
    configuration says these, so that the source's stages are no guide. placed: rules of the user's
    own that say the stage of parameters outside the list.
    """

    layers: str | None = None
    counts: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    interleave: int = 1
    from_config: bool = False
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
