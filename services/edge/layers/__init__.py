"""Layers on a node: built, checked, stored by digest, named in the catalogue, mounted once.

    store      immutable EROFS images, found by the digest of their bytes
    archive    what a tar archive may contain
    build      archive -> directory -> image -> check -> store
    catalogue  name@version -> digest, claimed by compare-and-set
    uploads    archives on their way from a caller
    publish    the verbs of the `layers` subjects
    mounts     images mounted in the node's namespace, counted by sandbox
    serve      all of it put together for an edge

What an overlay is and how an image is mounted is libhost's; which layers a sandbox gets is the
scheduler's, who resolves names with the same functions (`libdsec.wire.layer`).
"""
