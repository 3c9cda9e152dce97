"""The mixture-of-experts layers that another project's configuration describes.

``from_hf_config`` and ``from_megatron_args`` return ``LayerSpec`` objects and refuse, by name,
every option of the experts that they do not read. Nothing of those projects is imported.
"""

from samebits.integrations.configs.huggingface import from_hf_config as from_hf_config
from samebits.integrations.configs.megatron import from_megatron_args as from_megatron_args
from samebits.integrations.configs.spec import LayerSpec as LayerSpec
from samebits.integrations.configs.spec import SharedSpec as SharedSpec
