from stablenorm.testing.plain import *  # moved
