import aiohttp

class AIOHTTPSession:
    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession: ...
