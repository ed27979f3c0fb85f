"""The cost of attention on a machine: FLOPs, slow-memory traffic and a predicted time, before anything is run.

``python -m flash_attn_ext.iomodel --help`` has the commands. counts.py runs the algorithms of flash_attn_ext.reference
on shapes alone and counts. devices.py lists the rates of devices.
"""
