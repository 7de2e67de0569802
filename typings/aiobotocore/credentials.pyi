from botocore.credentials import ReadOnlyCredentials

class AioCredentials:
    def __init__(
        self,
        access_key: str,
        secret_key: str,
        token: str | None = None,
        method: str | None = None,
        account_id: str | None = None,
    ) -> None: ...
    async def get_frozen_credentials(self) -> ReadOnlyCredentials: ...
