"""Runs programs that nobody trusts. Everything in here but `client` uses the standard library alone.

Processes of one sandbox, each the child of the one before:

    client      our own process, any thread
    worker      holds the batch: schedules, watches the clock, the memory and the disk
    zygote      has never seen a test; forks a judge for each program and clears up behind it
    judge       forks the program's process first, then reads the tests and runs them
    program     the generated code; sees the arguments of calls and its own standard input, nothing else

What the program sends back is data: it cannot raise, compare, exit or print its way to a verdict.
"""
