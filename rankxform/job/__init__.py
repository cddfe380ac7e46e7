"""A conversion from its request to its report. All processes call these functions together."""

from .convert import Report, transform
from .prepare import Conversion, prepare
from .request import Request

__all__ = ["Conversion", "Report", "Request", "prepare", "transform"]
