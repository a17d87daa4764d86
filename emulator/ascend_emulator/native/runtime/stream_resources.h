// A device has so many streams (--streams): those of the program, one for each stream that takes part
// in a captured graph, and those of collective communication.
#pragma once

#include <cstdint>
#include <string>

#include "abi.h"

namespace emulator {

enum class StreamUse { kProgram, kGraph, kCommunication };

// Takes `count` streams of a device, or none: 207008 if fewer are left. `wanted_for` is for the
// message.
aclError take_streams(int device, int count, StreamUse use, const std::string& wanted_for);
void give_streams(int device, int count, StreamUse use);
int free_streams(int device);

}  // namespace emulator
