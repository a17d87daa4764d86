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

// For the collectives. `emulator_take_streams` holds streams outside of graphs until they are given
// back. `emulator_note_communication` is to be called before an operation of `group` (any address
// that stands for it) is put onto a stream: if that stream is captured, the graph takes the group's
// streams (--hccl-streams) once and holds them until it is destroyed.
ACL_API aclError emulator_take_streams(int device, int count, const char* wanted_for);
ACL_API void emulator_give_streams(int device, int count);
ACL_API aclError emulator_note_communication(aclrtStream stream, const void* group);
