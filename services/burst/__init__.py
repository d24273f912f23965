"""Where a request may go when the local nodes are full.

    eligibility   may this request leave for the cloud; pure
    utilisation   how full the local nodes are, and whether that is too full; pure
    handlers      the two questions that are answered

Any number of replicas; each hears every heartbeat and comes to the same answer, so none keeps
anything. The pool of cloud machines is not built: until a pool registers nodes, an answer names
only `local`, and says why.
"""
