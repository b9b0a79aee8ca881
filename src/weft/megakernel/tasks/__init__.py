"""What a worker of the persistent kernel does: a body for each kind of task, and the scoreboard.

A body makes one tile and hands it to a destination; it neither waits nor signals.
"""
