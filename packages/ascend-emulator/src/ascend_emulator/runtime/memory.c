/* Device and pinned host memory: allocation, accounting against a limit, poison, and the question "whose is this address".
 * Copies are in copy.c. Freed device blocks are poisoned and stay mapped for a while (quarantine), so that a graph that
 * still reads them reads poison. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

enum { HOST = EMULATOR_MAX_DEVICES, OWNERS };
#define ALIGNMENT 512u
#define QUARANTINE_BYTES ((size_t)256 << 20)

typedef struct Block {
    char *start;
    size_t size;
    int owner; /* device index or HOST */
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks; /* sorted by start */
static size_t block_count, block_capacity;
static size_t used[OWNERS];
static size_t limit = (size_t)16 << 30;

typedef struct Freed {
    char *start;
    size_t size;
    struct Freed *next;
} Freed;
static Freed *oldest, *newest;
static size_t quarantined;

EMULATOR_API void emulator_set_memory_limit(uint64_t bytes) { limit = bytes; }

/* Index of the first block that starts after address. */
static size_t upper(const char *address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (blocks[middle].start <= address) low = middle + 1; else high = middle;
    }
    return low;
}

static int insert(Block block) {
    if (block_count == block_capacity) {
        size_t capacity = block_capacity ? block_capacity * 2 : 64;
        Block *grown = realloc(blocks, capacity * sizeof *blocks);
        if (!grown) return 0;
        blocks = grown;
        block_capacity = capacity;
    }
    size_t at = upper(block.start);
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
    blocks[at] = block;
    block_count++;
    return 1;
}

static char *take_quarantined(size_t size) {
    Freed *previous = NULL;
    for (Freed *item = oldest; item; previous = item, item = item->next) {
        if (item->size != size) continue;
        if (previous) previous->next = item->next; else oldest = item->next;
        if (newest == item) newest = previous;
        char *start = item->start;
        quarantined -= size;
        free(item);
        return start;
    }
    return NULL;
}

static void quarantine(char *start, size_t size) {
    Freed *item = malloc(sizeof *item);
    if (!item) { free(start); return; }
    *item = (Freed){start, size, NULL};
    if (newest) newest->next = item; else oldest = item;
    newest = item;
    quarantined += size;
    while (quarantined > QUARANTINE_BYTES && !emulator_active) {
        Freed *first = oldest;
        oldest = first->next;
        if (!oldest) newest = NULL;
        quarantined -= first->size;
        free(first->start);
        free(first);
    }
}

static aclError allocate(void **pointer, size_t bytes, int owner) {
    size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!size) size = ALIGNMENT;
    *pointer = NULL;
    pthread_mutex_lock(&lock);
    if (size < bytes || (owner != HOST && size > limit - used[owner])) {
        size_t left = owner == HOST ? 0 : limit - used[owner];
        pthread_mutex_unlock(&lock);
        return emulator_fail(ERROR_MEMORY, "out of memory: %zu bytes asked of npu:%d, %zu of %zu left", bytes, owner, left,
                             limit);
    }
    char *start = owner == HOST ? NULL : take_quarantined(size);
    if (!start) start = aligned_alloc(ALIGNMENT, size);
    if (start && !insert((Block){start, size, owner})) { free(start); start = NULL; }
    if (start) used[owner] += size;
    pthread_mutex_unlock(&lock);
    if (!start) return emulator_fail(ERROR_MEMORY, "out of host memory: %zu bytes asked", bytes);
    if (owner != HOST) memset(start, EMULATOR_POISON, size);
    *pointer = start;
    return ACL_SUCCESS;
}

static aclError release(void *pointer, int host) {
    if (!pointer) return ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    size_t at = upper(pointer);
    if (!at || blocks[at - 1].start != pointer || (blocks[at - 1].owner == HOST) != host) {
        pthread_mutex_unlock(&lock);
        return emulator_fail(ERROR_PARAMETER, "free of %p, which is not the start of a %s allocation", pointer,
                             host ? "pinned host" : "device");
    }
    Block block = blocks[--at];
    order_drop(block.start, block.size);
    memmove(blocks + at, blocks + at + 1, (block_count - at - 1) * sizeof *blocks);
    block_count--;
    used[block.owner] -= block.size;
    if (host) {
        free(block.start);
    } else {
        memset(block.start, EMULATOR_POISON, block.size);
        quarantine(block.start, block.size);
    }
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* -2 unknown, -1 pinned host, else the device; start and size of the allocation when asked for. */
EMULATOR_API int emulator_locate(const void *address, uint64_t *start, uint64_t *size) {
    int owner = -2;
    pthread_mutex_lock(&lock);
    size_t at = upper(address);
    if (at && (const char *)address < blocks[at - 1].start + blocks[at - 1].size) {
        const Block *block = &blocks[at - 1];
        owner = block->owner == HOST ? -1 : block->owner;
        if (start) *start = (uint64_t)(uintptr_t)block->start;
        if (size) *size = block->size;
    }
    pthread_mutex_unlock(&lock);
    return owner;
}

EMULATOR_API aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    return allocate(devPtr, size, emulator_device());
}

EMULATOR_API aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    return allocate(devPtr, size, emulator_device());
}

EMULATOR_API aclError aclrtMallocHost(void **hostPtr, size_t size) { return allocate(hostPtr, size, HOST); }

EMULATOR_API aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg) {
    (void)cfg;
    return allocate(ptr, size, HOST);
}

EMULATOR_API aclError aclrtFree(void *devPtr) { return release(devPtr, 0); }
EMULATOR_API aclError aclrtFreeHost(void *hostPtr) { return release(hostPtr, 1); }

EMULATOR_API aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free_bytes, size_t *total) {
    (void)attr;
    pthread_mutex_lock(&lock);
    *free_bytes = limit - used[emulator_device()];
    *total = limit;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr) {
    (void)size;
    (void)type;
    if (devPtr) *devPtr = ptr;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag) {
    (void)ptr;
    (void)size;
    (void)flag;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtHostUnregister(void *ptr) { (void)ptr; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes) {
    int owner = emulator_locate(ptr, NULL, NULL);
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = owner == -2 ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : owner == -1 ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = owner < 0 ? 0 : (uint32_t)owner;
    attributes->pageSize = 4096;
    return ACL_SUCCESS;
}
