from host_rig import home, launch, script, served, short_tmp

__all__ = ["home", "launch", "script", "served", "short_tmp"]
