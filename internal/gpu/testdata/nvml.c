/* Stands in for NVML: three GPUs, of which the second is cut into one MIG instance and the third is
 * lost. The declarations are those of nvml.h. */
#include <stdio.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st { int number, part; } *nvmlDevice_t;
typedef struct nvmlEventSet_st { int waits; unsigned long long types; } *nvmlEventSet_t;
typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, LOST = 15, UNKNOWN = 999 };

static struct nvmlDevice_st devices[] = {{0, 0}, {1, 0}, {2, 0}}, part = {1, 1};
static struct nvmlEventSet_st set;
static int running;

nvmlReturn_t nvmlInit_v2(void) { running++; return SUCCESS; }
nvmlReturn_t nvmlShutdown(void) { running--; return SUCCESS; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *n) { *n = 3; return running > 0 ? SUCCESS : 1; }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
	if (index > 2) return INVALID;
	*device = &devices[index];
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned int length) {
	return snprintf(uuid, length, "%s-%d", d->part ? "MIG" : "GPU", d->number) < (int)length ? SUCCESS : 7;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned int *degrees) {
	if (sensor != 0) return INVALID;
	if (d->part) return UNSUPPORTED;
	*degrees = 40;
	return d->number == 2 ? LOST : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *now, unsigned int *pending) {
	*now = *pending = d->number == 1;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *n) { *n = 7; return SUCCESS; }

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *mig) {
	if (index != 4) return NOT_FOUND;
	*mig = &part;
	return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned int *id) { *id = 7; return d->part ? SUCCESS : INVALID; }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned int *id) { *id = 3; return d->part ? SUCCESS : INVALID; }

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types) { *types = 0xffff; return SUCCESS; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t s) {
	s->types |= types;
	return SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *s) { memset(&set, 0, sizeof set); *s = &set; return SUCCESS; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t s) { return s == &set ? SUCCESS : INVALID; }

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t s, nvmlEventData_t *data, unsigned int ms) {
	if (s->waits++ > 0) return UNKNOWN;
	if (s->types != 10 || ms != 500) return INVALID;
	*data = (nvmlEventData_t){&devices[1], 8, 95, 7, 0xffffffff};
	return SUCCESS;
}
