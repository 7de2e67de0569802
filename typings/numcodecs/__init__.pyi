from numcodecs import blosc as blosc
from numcodecs import lz4 as lz4
