"""The cost of attention on a machine: FLOPs, slow-memory traffic and a predicted time, before anything is run.

``python -m flash_attn_ext.iomodel --help`` has the commands. The counts come from running the algorithms of
flash_attn_ext.reference on shapes alone (counts.py); only rates of devices are typed in (devices.py).
"""
