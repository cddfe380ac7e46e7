"""A conversion from its request to its report. All processes call these functions together."""

from .convert import Report, transform
from .fit import already_fits
from .load import Parameters, load, own_rank
from .metrics import since_process_start
from .one import convert_one
from .predict import Prediction, predict
from .prepare import Conversion, prepare
from .replicas import Agreement, compare_replicas
from .request import Request
from .simulate import PLACES, foreseen, on_paper
from .verify import Verdict, verify, verify_alone

__all__ = [
    "Agreement",
    "PLACES",
    "already_fits",
    "compare_replicas",
    "convert_one",
    "foreseen",
    "Conversion",
    "Parameters",
    "Prediction",
    "Report",
    "Request",
    "Verdict",
    "load",
    "on_paper",
    "own_rank",
    "predict",
    "prepare",
    "since_process_start",
    "transform",
    "verify",
    "verify_alone",
]
