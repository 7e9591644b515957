"""The decorators of public functions: the tracebacks of errors about arguments.

The checks of shapes of the tests add frames, so the calls run in a new process.
"""

import subprocess
import sys

from tests.count import ROOT

CALLS = """
import traceback
import interp
from hooks import HookedRunner
from interp import edits
from models import load

model = load("pydoc-4l")
runner = HookedRunner(model)
_, cache = runner.run_with_cache("def f(x):")
hooks = {"blocks.1.attn.z": edits.zero(head=99)}

def of_the_user(value, point):
    return cache["blocks.9.attn.z"]

calls = [
    lambda: runner.run_with_hooks("def f(x):", hooks=hooks),
    lambda: runner.run_with_hooks("def f(x):", hooks={"blocks.9.attn.z": print}),
    lambda: interp.sweep(model, "def f(x):", [hooks], interp.log_prob("a")),
    lambda: runner.run_with_hooks("def f(x):", hooks={"blocks.1.attn.z": of_the_user}),
]
for call in calls:
    try:
        call()
    except Exception as error:
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        print(*dict.fromkeys(frames[2:]))
"""


def test_an_error_of_an_argument_has_no_frames_of_the_model():
    command = [sys.executable, "-c", CALLS]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *of_arguments, of_the_user = ran.stdout.splitlines()
    # The only other frame is the frame of the decorator with the progress bar.
    assert of_arguments == ["", "", "run"]
    assert {"forward", "of_the_user"} <= {*of_the_user.split()}
