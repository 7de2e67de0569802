path: str
