"""Record which experts a rollout chose, and make a training step choose the same.

A token near a tie goes to another expert when its router sees other bits, and then nothing that
follows agrees. With the recorded choice both runs use the same experts; the probabilities are
computed again from the logits of all experts, so that their gradient reaches the router.
"""

from samebits.replay.hooks import Recorder as Recorder
from samebits.replay.hooks import recording as recording
from samebits.replay.hooks import replaying as replaying
from samebits.replay.record import LayerRecord as LayerRecord
from samebits.replay.record import RecordError as RecordError
from samebits.replay.record import RoutingRecord as RoutingRecord
