import yaml

class ScalarAnalysis:
    allow_block_plain: bool

class Emitter:
    event: yaml.Event | None
    analysis: ScalarAnalysis | None
    def choose_scalar_style(self) -> str: ...
