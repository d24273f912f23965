"""The edge's side of the agent channel (``aether/PROTOCOL.md``): one asyncio connection to one sandbox's PID 1.

    channel = await AgentChannel.connect(path)              # .hello: boot id, limits, what runs
    result = await channel.exec(ExecSpec(exec_id=..., argv=("true",)), stdin=b"", on_output=None) -> AgentResult
    process = await channel.start(spec) -> AgentProcess     # .pid; async for OutputChunk; write, close_stdin, wait, detach
    process = await channel.attach(exec_id, stdout_offset=0, stderr_offset=0) -> AgentProcess
    await channel.write_stdin(exec_id, data); await channel.close_stdin(exec_id)
    await channel.kill(exec_id, signal=SIGKILL, scope=KillScope.TREE) -> bool   # False: nothing was alive
    await channel.processes() -> tuple[ProcessInfo, ...]
    await channel.ping() -> float seconds
    await channel.frozen_for(seconds)                       # before thawing, PROTOCOL.md "Time"
    await channel.shutdown(grace_s)
    await channel.wait_closed(); await channel.aclose()
    channel.files.read / write / list / stat / remove / rename / make_dir   # OSError by errno

It owns the connection and nothing else: no retry, no reconnection, no knowledge of sandboxes. After an edge restart, or
``AgentGoneError``, make a fresh connection and attach to what its hello lists.
"""
