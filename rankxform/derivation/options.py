"""How a destination's strategy is derived, where it is not given: options."""

from __future__ import annotations

from rankxform.errors import UsageError
from rankxform.options import (
    AFFECTS_LOAD,
    GROUP_DERIVATION,
    TYPE_FLAG,
    TYPE_NUMBER,
    TYPE_NUMBERS,
    TYPE_REPEATED,
    choice_of,
    flag_of,
    is_default,
    option,
    options_of,
)
from rankxform.values import dataclass


@dataclass(frozen=True, kw_only=True)
class DeriveOptions:
    """How a destination's strategy is derived, where it is not given. See the help of each."""

    dst_parallel: str | None = option(
        None, GROUP_DERIVATION, "sizes of the destination job (dp, mp, pp, cp, ep); vocab_emb_dp "
        "and use_seq_parallel are true or false; same keeps the source's sizes within a stage, "
        "and same,pp=2 changes pp alone", AFFECTS_LOAD, metavar="dp=2,mp=4,..",
    )  # fmt: skip
    dst_config: str | None = option(
        None, GROUP_DERIVATION, "sizes of the destination job, from a MindFormers configuration "
        "(YAML)", AFFECTS_LOAD, metavar="FILE",
    )  # fmt: skip
    src_parallel: str | None = option(
        None, GROUP_DERIVATION, "sizes of the source job, by which its strategy is understood",
        AFFECTS_LOAD, metavar="dp=8,mp=1,..",
    )  # fmt: skip
    src_config: str | None = option(
        None, GROUP_DERIVATION, "sizes of the source job, from a MindFormers configuration "
        "(YAML); with --preset also its strategy, if none is given", AFFECTS_LOAD, metavar="FILE",
    )  # fmt: skip
    preset: str | None = option(
        None, GROUP_DERIVATION, "what shards the parameters of a known network (llama, "
        "deepseek_v3, ...), or a rules file (*.toml)", AFFECTS_LOAD, metavar="NAME",
    )  # fmt: skip
    unproven: bool = option(
        False, GROUP_DERIVATION, "accept a preset that no compiled strategy file has confirmed",
        AFFECTS_LOAD, kind=TYPE_FLAG,
    )  # fmt: skip
    rule: tuple[str, ...] = option(
        (), GROUP_DERIVATION, "what shards the parameters whose name matches, such as 'wq=(mp, "
        "None)'; repeatable, tried before a preset", AFFECTS_LOAD, kind=TYPE_REPEATED,
        metavar="REGEX=(mp, None)",
    )  # fmt: skip
    predict: bool = option(
        False, GROUP_DERIVATION, "the destination job is inference: no optimizer states",
        AFFECTS_LOAD, kind=TYPE_FLAG,
    )  # fmt: skip
    optimizer_shard: str | None = option(
        None, GROUP_DERIVATION, "whether the destination's optimizer shards parameters: on, off, "
        "or into how many shards (optimizer_weight_shard_size)", AFFECTS_LOAD, metavar="on|off|N",
    )  # fmt: skip
    opt_on: tuple[str, ...] = option(
        (), GROUP_DERIVATION, "parameters that the optimizer shards; repeatable", AFFECTS_LOAD,
        kind=TYPE_REPEATED, metavar="REGEX",
    )  # fmt: skip
    opt_off: tuple[str, ...] = option(
        (), GROUP_DERIVATION, "parameters that it does not shard (parallel_optimizer=False); "
        "repeatable", AFFECTS_LOAD, kind=TYPE_REPEATED, metavar="REGEX",
    )  # fmt: skip
    threshold: int | None = option(
        None, GROUP_DERIVATION, "size from which the optimizer shards a parameter (default: the "
        "source's where it is stated, or 64)", AFFECTS_LOAD, kind=TYPE_NUMBER, metavar="KIB",
    )  # fmt: skip
    src_threshold: int | None = option(
        None, GROUP_DERIVATION, "the threshold of the source job (default: 64)", AFFECTS_LOAD,
        kind=TYPE_NUMBER, metavar="KIB",
    )  # fmt: skip
    layers_per_stage: tuple[int, ...] = option(
        (), GROUP_DERIVATION, "layers of each pipeline stage", AFFECTS_LOAD, kind=TYPE_NUMBERS,
        metavar="N,N,..",
    )  # fmt: skip
    unsharded: str | None = option(
        None, GROUP_DERIVATION, "cp: context parallel shards no parameter of the network",
        AFFECTS_LOAD, kind=choice_of(("cp",)),
    )  # fmt: skip

    @property
    def derives(self) -> bool:
        """Whether the destination's strategy is to be derived."""
        return self.dst_parallel is not None or self.dst_config is not None

    def check_derives(self) -> None:
        """Raise UsageError for options of a derivation where none is asked for."""
        for option_field in options_of(DeriveOptions):
            if not is_default(self, option_field.name):
                flag = flag_of(option_field.name)
                text = f"{flag} is for --dst-parallel or --dst-config"
                source = ("--src-strategy FILE, of rankxform strategy derive, if SRC's is lost",)
                tries = source if self.src_parallel is not None else ()
                raise UsageError(text, "give one of them", f"leave out {flag}", *tries)
