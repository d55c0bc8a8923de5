"""The ways in which gradients travel, tried from the first to the last. A new one is a file here, and a name in the list."""

from colonnade.reduce.transports.base import Transport
from colonnade.reduce.transports.collective import Collective
from colonnade.reduce.transports.device_collective import DeviceCollective
from colonnade.reduce.transports.local import Local
from colonnade.reduce.transports.shared_memory import SharedMemory

TRANSPORTS: list[type[Transport]] = [Local, SharedMemory, DeviceCollective, Collective]

__all__ = ["TRANSPORTS", "Transport"]
