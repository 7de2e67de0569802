"""How blocking code runs asynchronous code.

One event loop on a separate thread serves the whole process (`portal`, which also limits calls in
time). Methods that block and their `_async` twins come from one declaration (`pairs`). `iterators`
serve both `for` and `async for`, `functions` calls what users give in threads, and `tracebacks`
leaves out of errors what says nothing to a caller.

Packages that build on the facade use `portal.run`.
"""
