from typing import Any

class AWSRequest:
    headers: Any
    context: dict[str, Any]
    def __init__(self, method: str, url: str, headers: dict[str, str], data: bytes) -> None: ...
