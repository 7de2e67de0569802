"""The native repositories and sessions behind the facade's.

A handle (`repositories`, `sessions`) opens its native object on the portal's loop, shares it, and
opens it again where it is unpickled. `arguments` converts the arguments of the facade to those of
the library.

Packages that build on the facade find the handles as `Repository.handle` and `Session.handle`,
and make their own.
"""
