"""Bytes to values and back: strategy files, and the containers of checkpoints.

Readers find things in bytes that they are handed; they open nothing and import no MindSpore.
"""

from .ckpt import Ckpt
from .container import CONTAINERS
from .dcp_containers import Distcp, Raw
from .safetensors import Safetensors

CONTAINERS.update(
    {container.name: container for container in (Ckpt(), Safetensors(), Distcp(), Raw())}
)
