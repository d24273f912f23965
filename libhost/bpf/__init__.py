"""Network policy in the kernel: one BPF object, its maps, and the table that fills them.

``policy.bpf.c`` decides, ``table.PolicyTable`` is the one writer of its maps. The maps are pinned
and are the whole state: nothing here is written to disk, and a successor finds what is in force.
"""
