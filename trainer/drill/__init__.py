"""`wmse drill`: faults on this machine and file system, injected into a toy run from outside."""
