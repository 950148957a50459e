"""Passes in a process of their own: a crash of the engine costs one pass and gives a message.

`client` is the parent's side, `child` the worker's, `spawn` what starts one; nothing is imported here, so that a
worker can be started before the parent loads anything heavy.
"""
