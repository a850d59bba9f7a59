"""The former name of `stablenorm.check`: imports from here keep working."""

from stablenorm import check
from stablenorm.check import *

__all__ = check.__all__
