"""A conversion from its request to its report. All processes call these functions together."""

from .prepare import Conversion, prepare
from .request import Request
from .transform import Report, transform

__all__ = ["Conversion", "Report", "Request", "prepare", "transform"]
