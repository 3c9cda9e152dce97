"""`samebits check logprobs`: How far are two engines' log-probs apart, and does a mistake show?

Recordings are read from files (``reading``) or made of models in this process
(``compare.record``); ``figures`` measures, ``diagnose`` looks for shifts, temperatures and masks.
docs/logprobs.md explains every figure.
"""

from samebits.checks.logprobs.command import add_arguments as add_arguments
from samebits.checks.logprobs.command import main as main
from samebits.checks.logprobs.compare import compare as compare
from samebits.checks.logprobs.compare import compare_models as compare_models
from samebits.checks.logprobs.compare import record as record
from samebits.checks.logprobs.reading import read as read
from samebits.checks.logprobs.recording import Recording as Recording
from samebits.checks.logprobs.recording import RecordingError as RecordingError
