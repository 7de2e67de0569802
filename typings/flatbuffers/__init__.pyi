from flatbuffers.builder import Builder as Builder
