from stablenorm.testing.families import *  # moved
