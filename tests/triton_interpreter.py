"""Triton's interpreter on a CPU, made fit for fla's kernels: `python -m tests.triton_interpreter CODE…`.

The interpreter is chosen when a kernel is defined, so that a whole process has it or has not: `interpreted` runs code
in a process of its own. Two things are mended there, before fla is imported:

- The autotuner takes the first configuration that is offered. It would time all of them, on a CPU.
- The variable of a `for … in range(…)` in a kernel has `to`, as the tensor that it is in compiled code.
"""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

COMPILER_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def interpreted(code: str, *arguments: str, timeout_seconds: int = 300) -> str:
    """Return what Python code prints in a process whose kernels are interpreted; a failure there is one here."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mend() -> None:
    """Mend Triton in this process, in which `TRITON_INTERPRET` is 1 and fla is not imported yet."""
    assert os.environ.get("TRITON_INTERPRET") == "1" and "fla" not in sys.modules
    import triton
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    class LoopIndex(int):
        def to(self, dtype: Any) -> Any:
            return interpreter._implicit_cvt(int(self)).to(dtype)

    def loop_range(*bounds: Any) -> Iterator[int]:
        return map(LoopIndex, builtins.range(*bounds))

    def run_first(tuner: Any, *arguments: Any, **named: Any) -> Any:
        first = tuner.configs[0]
        if first.pre_hook is not None:
            first.pre_hook({**dict(zip(tuner.arg_names, arguments, strict=False)), **named, **first.all_kwargs()})
        values = {name: value for name, value in first.all_kwargs().items() if name not in COMPILER_OPTIONS}
        return tuner.fn.run(*arguments, **named, **values)

    define = interpreter.InterpretedFunction.__init__

    def define_with_range(kernel: Any, function: Any, **options: Any) -> None:
        define(kernel, function, **options)
        function.__globals__["range"] = loop_range

    interpreter.InterpretedFunction.__init__ = define_with_range
    Autotuner.run = run_first
    triton.knobs.compilation.front_end_debugging = True  # an error keeps the line of the kernel that raised it


if __name__ == "__main__":
    mend()
    program, sys.argv = sys.argv[1], sys.argv[1:]
    exec(compile(program, "<interpreted>", "exec"), {"__name__": "__main__"})
