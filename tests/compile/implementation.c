/* The one file of a program that holds the functions. */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"
