from stablenorm.testing.published import *  # moved
