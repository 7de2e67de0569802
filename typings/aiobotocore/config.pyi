from typing import Any

class AioConfig:
    def __init__(self, **options: Any) -> None: ...
