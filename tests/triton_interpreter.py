"""Triton's interpreter on a CPU, made fit for fla's kernels.

The interpreter is chosen when a kernel is defined, so that a whole process has it or has not: `interpreted` runs code
in a process of its own, forked from one that has imported fla (`serve`). Two things are mended there before:

- The autotuner takes the first configuration that is offered. It would time all of them, on a CPU.
- The variable of a `for … in range(…)` in a kernel has `to`, as the tensor that it is in compiled code.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPILER_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


def interpreted(code: str, *arguments: str, timeout_seconds: int = 300) -> str:
    """Return what Python code prints in a process whose kernels are interpreted; a failure there is one here."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps({"code": code, "arguments": arguments, "folder": folder}) + "\n")
        server.stdin.flush()
        ready, _, _ = select.select([server.stdout], [], [], timeout_seconds)
        if not ready:
            _end(server)
        answer = server.stdout.readline().strip()
        out, err = (path.read_text() if path.exists() else "" for path in _outputs(folder))
    assert answer == "0", err or f"no answer within {timeout_seconds} s"
    return out


def _outputs(folder: str) -> tuple[Path, Path]:
    return Path(folder, "out"), Path(folder, "err")


@functools.cache
def _server() -> subprocess.Popen[str]:
    # A GPU that fla finds at its import would be no use to a fork.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-m", __name__], env=environment, start_new_session=True, **pipes)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Kill the server and what it runs, and let the next test start another."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    _server.cache_clear()


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


def serve() -> None:
    """Run the code of each line of stdin in a fork of this process, and answer with its exit code."""
    mend()
    import fla  # noqa: F401

    import flame.train.model  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(code: str, arguments: list[str], folder: str) -> None:
    for path, descriptor in zip(_outputs(folder), (1, 2), strict=True):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = ["<interpreted>", *arguments]
    failed = True
    try:
        exec(compile(code, "<interpreted>", "exec"), {"__name__": "__main__"})
        failed = False
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


if __name__ == "__main__":
    serve()
