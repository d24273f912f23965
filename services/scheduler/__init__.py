"""The scheduler: any number of interchangeable processes that turn waiting requests into sandboxes.

Read `protocol` (what happens to one request; pure), `placement` and `filters` (which node; pure),
then `driver` and `lanes` (how the bus carries it out) and `__main__` (what is wired to what).
"""
