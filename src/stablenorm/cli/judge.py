"""
Judge the digits of a layer or RMS norm of yours on hard inputs: limits, no tolerance.

check asks: is the mathematics right? judge asks: are the digits? The limit of
each element follows from the exact result and the arithmetic that you declare.
An error is split into the intermediates that it came through.

examples:
  stablenorm judge my_kernel.py
  stablenorm judge my_kernel.py --statistics float32 --sums 64
  stablenorm judge my_package.norms:forward,backward
  stablenorm judge my_kernel.py --kind rms --cast xhat --dtype bfloat16
  stablenorm judge my_kernel.py --families F03 F18 --full --json judge.json

the file must hold functions, or a class with --class:
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
A forward alone, which returns y, is judged too. Arrays are NumPy's: convert
them in the file, or call stablenorm.testing.judge from Python.

THE CODE OF THE FILE IS RUN, in a process of its own: judge only files that you
trust. Where GITHUB_ACTIONS is set, failures are annotations.

exit status: 0 no limit exceeded, 1 a limit exceeded, 2 not judged
"""

import argparse
import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from stablenorm.check.results import Finding
from stablenorm.cli import parts
from stablenorm.cli.child import run_apart, silence
from stablenorm.cli.user_norm import UserFile, adapt_class, adapt_functions
from stablenorm.formats import DTYPES
from stablenorm.testing import FAMILIES, judge
