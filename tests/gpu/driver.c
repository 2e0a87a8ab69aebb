/*
 * A stand-in for libnvidia-ml.so.1: the driver's side of NVML, so that the real binding with its real structures is
 * what the tests run. Everything it knows stands in the text file that GPUORCH_FAKE_DRIVER names, read anew with every
 * call: `driver.py` writes it. A line is a kind and its fields, in any order; names with spaces are quoted:
 *
 *   driver version=580.65.06 nvml=13.580.65.06
 *   gpu uuid=GPU-a bus=00000000:41:00.0 name="NVIDIA A100" total=BYTES reserved=BYTES used=BYTES utilization=7
 *       temperature=40 mig=0 ecc=0 pending=0 failed=0 retired=0 recovery=0
 *   slice uuid=MIG-a card=GPU-a position=0 instance=3 name="…" total=BYTES reserved=BYTES used=BYTES
 *   process on=UUID pid=1 bytes=BYTES|unknown list=compute|graphics|mps alive=1
 *   fault call=CALL on=UUID|all code=15
 *   hang call=CALL
 *   xid serial=1 on=UUID number=79 instance=3
 *
 * `used` is what nobody in the process list holds; memory in use is that plus what the processes hold, each counted
 * once. With alive=1 a process counts until it dies, as on a real card. CALL is the part of the driver that fails: see
 * ENTER below. A hang lasts until its line is gone. Events go to the sets that exist when their line appears.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, VERSION_MISMATCH = 25, UNKNOWN = 999
};
enum { MAX_LINES = 512, MAX_FIELDS = 20, MAX_HANDLES = 256, MAX_SETS = 64, XID_EVENT = 8, NO_INSTANCE = -1 };

typedef struct { char *key, *value; } Field;
typedef struct { char *kind; Field fields[MAX_FIELDS]; int count; } Line;
typedef struct { char *text; Line lines[MAX_LINES]; int count; } World;
typedef struct { char uuid[96]; } Handle; /* lives as long as the library; what it stands for may vanish */
typedef struct { int used, count, spoiled; long seen; Handle *cards[64]; } EventSet;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int instance, compute; } Process;
typedef struct {
    char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32];
} Pci;
typedef struct { Handle *device; unsigned long long type, data; unsigned int instance, compute; } Event;
typedef struct { unsigned int gpu, memory; } Rates;
typedef struct {
    unsigned int processors, copiers, decoders, encoders, jpegs, flows, gpu_slices, compute_slices;
    unsigned long long memory_mb;
} Attributes;
typedef struct {
    unsigned int field, scope; int64_t when, latency; unsigned int type; int result; unsigned long long value;
} FieldValue;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static Handle handles[MAX_HANDLES];
static EventSet sets[MAX_SETS];
static int opened;

/* --- the file --- */

static char *next_field(char *at, Field *field)
{
    field->key = at;
    field->value = "";
    char *equals = strchr(at, '=');
    if (!equals) return NULL;
    *equals = 0;
    char end = equals[1] == '"' ? '"' : ' ';
    field->value = equals + (end == '"' ? 2 : 1);
    at = strchr(field->value, end);
    if (!at) return NULL;
    *at++ = 0;
    return at + strspn(at, " ");
}

static void parse(World *world)
{
    for (char *at = strtok(world->text, "\n"); at && world->count < MAX_LINES; at = strtok(NULL, "\n")) {
        Line *line = &world->lines[world->count++];
        line->kind = at;
        char *rest = strchr(at, ' ');
        if (rest) *rest++ = 0;
        while (rest && *rest && line->count < MAX_FIELDS) rest = next_field(rest, &line->fields[line->count++]);
    }
}

static void look(World *world)
{
    memset(world, 0, sizeof *world);
    FILE *file = fopen(getenv("GPUORCH_FAKE_DRIVER") ? getenv("GPUORCH_FAKE_DRIVER") : "", "r");
    size_t size = 0;
    if (!file) return;
    if (getdelim(&world->text, &size, 0, file) > 0) parse(world);
    fclose(file);
}

static char *text(Line *line, const char *key, char *otherwise)
{
    for (int i = 0; line && i < line->count; i++)
        if (!strcmp(line->fields[i].key, key)) return line->fields[i].value;
    return otherwise;
}

static long long number(Line *line, const char *key) { return atoll(text(line, key, "0")); }
static int is(Line *line, const char *kind) { return !strcmp(line->kind, kind); }
static int has(Line *line, const char *key, const char *value) { return !strcmp(text(line, key, ""), value); }

static Line *find(World *world, const char *kind, const char *key, const char *value)
{
    for (int i = 0; i < world->count; i++)
        if (is(&world->lines[i], kind) && has(&world->lines[i], key, value)) return &world->lines[i];
    return NULL;
}

static Line *nth(World *world, const char *kind, int index)
{
    for (int i = 0; i < world->count; i++)
        if (is(&world->lines[i], kind) && index-- == 0) return &world->lines[i];
    return NULL;
}

static Line *device_of(World *world, const char *uuid)
{
    Line *line = find(world, "gpu", "uuid", uuid);
    return line ? line : find(world, "slice", "uuid", uuid);
}

static const char *card_of(World *world, const char *uuid)
{
    Line *slice = find(world, "slice", "uuid", uuid);
    return slice ? text(slice, "card", "") : uuid;
}

/* --- faults --- */

static int fault(World *world, const char *call, const char *uuid)
{
    for (int i = 0; i < world->count; i++) {
        Line *line = &world->lines[i];
        if (!is(line, "fault") || !(has(line, "call", call) || (uuid && has(line, "call", "device")))) continue;
        if (has(line, "on", "all") || (uuid && (has(line, "on", uuid) || has(line, "on", card_of(world, uuid)))))
            return (int)number(line, "code");
    }
    return SUCCESS;
}

static void hang(const char *call)
{
    for (int hanging = 1; hanging;) {
        World world;
        look(&world);
        hanging = find(&world, "hang", "call", call) != NULL;
        free(world.text);
        if (hanging) usleep(10000);
    }
}

/* Every call passes here: it may hang, the library may be closed, the device gone, or a fault ordered. */
static int enter(World *world, const char *call, Handle *handle)
{
    hang(call);
    pthread_mutex_lock(&guard);
    look(world);
    if (!opened) return UNINITIALIZED;
    int code = fault(world, call, handle ? handle->uuid : NULL);
    if (code) return code;
    return handle && !device_of(world, handle->uuid) ? INVALID_ARGUMENT : SUCCESS;
}

static int leave(World *world, int code)
{
    free(world->text);
    pthread_mutex_unlock(&guard);
    return code;
}

#define ENTER(call, handle) \
    World world; \
    int code = enter(&world, call, handle); \
    if (code) return leave(&world, code)
#define LEAVE(result) return leave(&world, result)
#define DEVICE(handle) device_of(&world, (handle)->uuid)

static Handle *handle_of(const char *uuid)
{
    for (int i = 0; i < MAX_HANDLES; i++) {
        if (!handles[i].uuid[0]) snprintf(handles[i].uuid, sizeof handles[i].uuid, "%s", uuid);
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    }
    abort();
}

/* --- memory and its holders --- */

static int holds(Line *process)
{
    char path[64], state = 'Z';
    if (!number(process, "alive")) return 1;
    snprintf(path, sizeof path, "/proc/%lld/stat", number(process, "pid"));
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    fclose(file);
    return state != 'Z';
}

static unsigned long long in_use(World *world, Line *device)
{
    unsigned long long sum = (unsigned long long)number(device, "used");
    const char *uuid = text(device, "uuid", "");
    for (int i = 0; i < world->count; i++) {
        Line *process = &world->lines[i];
        int counted = 0;
        if (!is(process, "process") || !has(process, "on", uuid) || !holds(process)) continue;
        for (int j = 0; j < i; j++)
            counted |= is(&world->lines[j], "process") && has(&world->lines[j], "on", uuid) &&
                       number(&world->lines[j], "pid") == number(process, "pid");
        if (!counted) sum += (unsigned long long)number(process, "bytes");
    }
    return sum;
}

int nvmlDeviceGetMemoryInfo(Handle *handle, Memory *memory)
{
    ENTER("memory", handle);
    if ((code = fault(&world, "memory_v1", handle->uuid))) LEAVE(code);
    Line *device = DEVICE(handle);
    memory->total = (unsigned long long)number(device, "total");
    memory->used = (unsigned long long)number(device, "reserved") + in_use(&world, device);
    memory->free = memory->total - memory->used;
    LEAVE(SUCCESS);
}

int nvmlDeviceGetMemoryInfo_v2(Handle *handle, Memory2 *memory)
{
    ENTER("memory", handle);
    if ((code = fault(&world, "memory_v2", handle->uuid))) LEAVE(code);
    if (memory->version != (sizeof *memory | 2u << 24)) LEAVE(VERSION_MISMATCH);
    Line *device = DEVICE(handle);
    memory->total = (unsigned long long)number(device, "total");
    memory->reserved = (unsigned long long)number(device, "reserved");
    memory->used = in_use(&world, device);
    memory->free = memory->total - memory->reserved - memory->used;
    LEAVE(SUCCESS);
}

static int running(const char *list, const char *version, Handle *handle, unsigned int *count, Process *found)
{
    ENTER(list, handle);
    if ((code = fault(&world, "processes", handle->uuid))) LEAVE(code);
    if ((code = fault(&world, version, handle->uuid))) LEAVE(code);
    unsigned int room = *count, needed = 0;
    for (int i = 0; i < world.count; i++) {
        Line *line = &world.lines[i];
        if (!is(line, "process") || !has(line, "on", handle->uuid) || !has(line, "list", list) || !holds(line))
            continue;
        if (needed < room && found) {
            found[needed].pid = (unsigned int)number(line, "pid");
            found[needed].bytes = has(line, "bytes", "unknown") ? ~0ull : (unsigned long long)number(line, "bytes");
            found[needed].instance = found[needed].compute = (unsigned int)NO_INSTANCE;
        }
        needed++;
    }
    *count = needed;
    LEAVE(needed > room ? INSUFFICIENT_SIZE : SUCCESS);
}

#define RUNNING(name, list) \
    int nvmlDeviceGet##name##RunningProcesses_v2(Handle *handle, unsigned int *count, Process *found) \
    { return running(list, "processes_v2", handle, count, found); } \
    int nvmlDeviceGet##name##RunningProcesses_v3(Handle *handle, unsigned int *count, Process *found) \
    { return running(list, "processes_v3", handle, count, found); }
RUNNING(Compute, "compute")
RUNNING(Graphics, "graphics")
RUNNING(MPSCompute, "mps")

/* --- the library --- */

int nvmlInitWithFlags(unsigned int flags)
{
    World world;
    (void)flags;
    hang("init");
    pthread_mutex_lock(&guard);
    look(&world);
    int code = world.text ? fault(&world, "init", NULL) : DRIVER_NOT_LOADED;
    if (!code) opened++;
    return leave(&world, code);
}

int nvmlShutdown(void)
{
    ENTER("shutdown", NULL);
    opened--;
    LEAVE(SUCCESS);
}

const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "an error of the stand-in"; }

static int version(const char *key, char *found, unsigned int size)
{
    ENTER("version", NULL);
    snprintf(found, size, "%s", text(nth(&world, "driver", 0), key, "?"));
    LEAVE(SUCCESS);
}

int nvmlSystemGetDriverVersion(char *found, unsigned int size) { return version("version", found, size); }
int nvmlSystemGetNVMLVersion(char *found, unsigned int size) { return version("nvml", found, size); }

/* --- devices --- */

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER("count", NULL);
    for (*count = 0; nth(&world, "gpu", (int)*count); (*count)++) {}
    LEAVE(SUCCESS);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle **handle)
{
    ENTER("handle", NULL);
    Line *card = nth(&world, "gpu", (int)index);
    if (!card) LEAVE(INVALID_ARGUMENT);
    *handle = handle_of(text(card, "uuid", ""));
    LEAVE(fault(&world, "handle", (*handle)->uuid));
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **handle)
{
    ENTER("handle", NULL);
    if (!device_of(&world, uuid)) LEAVE(NOT_FOUND);
    *handle = handle_of(uuid);
    LEAVE(fault(&world, "handle", uuid));
}

int nvmlDeviceGetUUID(Handle *handle, char *found, unsigned int size)
{
    ENTER("uuid", handle);
    snprintf(found, size, "%s", handle->uuid);
    LEAVE(SUCCESS);
}

int nvmlDeviceGetName(Handle *handle, char *found, unsigned int size)
{
    ENTER("name", handle);
    snprintf(found, size, "%s", text(DEVICE(handle), "name", "?"));
    LEAVE(SUCCESS);
}

int nvmlDeviceGetPciInfo_v3(Handle *handle, Pci *found)
{
    ENTER("pci", handle);
    memset(found, 0, sizeof *found);
    snprintf(found->bus_id, sizeof found->bus_id, "%s", text(DEVICE(handle), "bus", ""));
    LEAVE(SUCCESS);
}

int nvmlDeviceGetMigMode(Handle *handle, unsigned int *now, unsigned int *pending)
{
    ENTER("mig", handle);
    if (has(DEVICE(handle), "mig", "")) LEAVE(NOT_SUPPORTED);
    *now = *pending = (unsigned int)number(DEVICE(handle), "mig");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetMaxMigDeviceCount(Handle *handle, unsigned int *count)
{
    ENTER("mig", handle);
    *count = 7;
    LEAVE(SUCCESS);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle *handle, unsigned int index, Handle **found)
{
    ENTER("slice", handle);
    for (int i = 0; i < world.count; i++) {
        Line *line = &world.lines[i];
        if (!is(line, "slice") || !has(line, "card", handle->uuid) || number(line, "position") != index) continue;
        *found = handle_of(text(line, "uuid", ""));
        LEAVE(SUCCESS);
    }
    LEAVE(NOT_FOUND);
}

int nvmlDeviceGetGpuInstanceId(Handle *handle, unsigned int *found)
{
    ENTER("mig", handle);
    *found = (unsigned int)number(DEVICE(handle), "instance");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetAttributes_v2(Handle *handle, Attributes *found)
{
    ENTER("mig", handle);
    memset(found, 0, sizeof *found);
    found->gpu_slices = (unsigned int)number(DEVICE(handle), "slices");
    found->memory_mb = (unsigned long long)number(DEVICE(handle), "total") >> 20;
    LEAVE(SUCCESS);
}

/* --- what a device does --- */

int nvmlDeviceGetUtilizationRates(Handle *handle, Rates *found)
{
    ENTER("utilization", handle);
    if (!is(DEVICE(handle), "gpu")) LEAVE(NOT_SUPPORTED);
    found->gpu = (unsigned int)number(DEVICE(handle), "utilization");
    found->memory = 0;
    LEAVE(SUCCESS);
}

int nvmlDeviceGetTemperature(Handle *handle, unsigned int sensor, unsigned int *found)
{
    (void)sensor;
    ENTER("temperature", handle);
    if (!is(DEVICE(handle), "gpu")) LEAVE(INVALID_ARGUMENT);
    *found = (unsigned int)number(DEVICE(handle), "temperature");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetTotalEccErrors(Handle *handle, unsigned int kind, unsigned int since, unsigned long long *found)
{
    ENTER("ecc", handle);
    if (has(DEVICE(handle), "ecc", "")) LEAVE(NOT_SUPPORTED);
    /* Only uncorrected (1) and volatile (0) ones are what we are asked about. */
    *found = kind == 1 && since == 0 ? (unsigned long long)number(DEVICE(handle), "ecc") : 12345;
    LEAVE(SUCCESS);
}

int nvmlDeviceGetRemappedRows(
    Handle *handle, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending, unsigned int *failed)
{
    ENTER("remap", handle);
    *corrected = *uncorrected = 3;
    *pending = (unsigned int)number(DEVICE(handle), "pending");
    *failed = (unsigned int)number(DEVICE(handle), "failed");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetRetiredPagesPendingStatus(Handle *handle, unsigned int *pending)
{
    ENTER("retired", handle);
    *pending = (unsigned int)number(DEVICE(handle), "retired");
    LEAVE(SUCCESS);
}

int nvmlDeviceGetFieldValues(Handle *handle, int count, FieldValue *values)
{
    ENTER("fields", handle);
    for (int i = 0; i < count; i++) {
        values[i].result = values[i].field == 230 ? SUCCESS : NOT_SUPPORTED;
        values[i].type = 1;
        values[i].value = (unsigned long long)number(DEVICE(handle), "recovery");
    }
    LEAVE(SUCCESS);
}

/* --- events --- */

int nvmlEventSetCreate(EventSet **found)
{
    ENTER("events", NULL);
    for (int i = 0; i < MAX_SETS; i++) {
        if (sets[i].used) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].used = 1;
        for (int j = 0; j < world.count; j++)
            if (is(&world.lines[j], "xid") && number(&world.lines[j], "serial") > sets[i].seen)
                sets[i].seen = (long)number(&world.lines[j], "serial");
        *found = &sets[i];
        LEAVE(SUCCESS);
    }
    LEAVE(UNKNOWN);
}

int nvmlEventSetFree(EventSet *set)
{
    ENTER("events", NULL);
    set->used = 0;
    LEAVE(SUCCESS);
}

int nvmlDeviceGetSupportedEventTypes(Handle *handle, unsigned long long *found)
{
    ENTER("events", handle);
    *found = 0x1f;
    LEAVE(SUCCESS);
}

int nvmlDeviceRegisterEvents(Handle *handle, unsigned long long types, EventSet *set)
{
    ENTER("register", handle);
    if (types != XID_EVENT || set->count == 64) LEAVE(INVALID_ARGUMENT);
    set->cards[set->count++] = handle;
    LEAVE(SUCCESS);
}

int nvmlEventSetWait_v2(EventSet *set, Event *found, unsigned int timeout_ms)
{
    if (!timeout_ms) pause(); /* what some drivers make of it */
    ENTER("wait", NULL);
    if (set->spoiled) LEAVE(set->spoiled); /* by one lost card, for all others */
    for (int i = 0; i < world.count; i++) {
        Line *line = &world.lines[i];
        if (!is(line, "xid") || number(line, "serial") <= set->seen) continue;
        set->seen = (long)number(line, "serial");
        for (int j = 0; j < set->count; j++) {
            if (strcmp(set->cards[j]->uuid, text(line, "on", ""))) continue;
            found->device = set->cards[j];
            found->type = XID_EVENT;
            found->data = (unsigned long long)number(line, "number");
            found->instance = found->compute =
                has(line, "instance", "") ? (unsigned int)NO_INSTANCE : (unsigned int)number(line, "instance");
            LEAVE(SUCCESS);
        }
    }
    for (int j = 0; j < set->count; j++)
        if ((code = fault(&world, "wait", set->cards[j]->uuid))) LEAVE(set->spoiled = code);
    LEAVE(TIMEOUT);
}
