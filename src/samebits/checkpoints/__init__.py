"""Convert checkpoints between the ways in which projects store their experts."""

from samebits.checkpoints.convert import Conversion as Conversion
from samebits.checkpoints.convert import convert as convert
from samebits.checkpoints.files import BadFileError as BadFileError
