"""JSON values as the format stores them: MessagePack in version 1, FlexBuffers in version 2.

`values` checks a value, `metadata` reads and writes it, `flexbuffers` is the codec of version 2.
"""
