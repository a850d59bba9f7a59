"""The former name of `stablenorm.check`: imports from here keep working."""

from stablenorm.check import *
