"""JSON values as the format stores them: MessagePack in version 1, FlexBuffers in version 2."""
