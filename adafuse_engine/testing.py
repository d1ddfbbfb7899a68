"""Members without weights, to test chains and agents against: see `ScriptedMember`."""

from adafuse_engine.members.scripted import ScriptedMember

__all__ = ["ScriptedMember"]
