from stablenorm.timing import *  # moved
