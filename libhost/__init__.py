"""The kernel layer: every mount, cgroup, namespace, device and process on the host is made here.

Synchronous on purpose, and ignorant of the bus, the store and the services: a function of this
package takes plain values and returns plain values or raises. Callers that live in an event loop
go through :mod:`libhost.aio`.
"""
