"""The Lua scripts of the Redis backend: the whole algorithm, each step one atomic script.

Every key starts with ``{dprims}:``, so that all of them live in one slot of a cluster and no lock
name, whatever braces it has, can be taken for a hash tag:

=====================  ======  ================================================================
``lock:<name>``        string  the holder, ``<id> <token> <ttl in ms> <record>``; expires with the ttl
``queue:<name>``       list    the ids of the waiters, first come first
``ticket:<id>``        string  a live waiter, ``<ttl in ms> <record>``; expires with its ttl
``wake:<id>``          list    filled to wake one waiter (BLPOP); says nothing about who holds what
``token``              string  the last token given; tokens are larger than it and at least TIME in us
``names``              zset    the names that have a holder, all with score 0, read by prefix
``cell:<key>``         string  a cell
``watch:<key>``        set     the ids that wait for that cell to have a value
=====================  ======  ================================================================

Only the server's clock is used: expiry, and TIME for tokens. A lock that nobody holds is handed to
the first *live* waiter inside whatever script sees it first, with that waiter's own ttl, so there is
no moment between release and hand-over, and any number of dead waiters are skipped in one step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

PREFIX = "{dprims}:"


@dataclass(frozen=True)
class Script:
    """A Lua script and the hash that the server knows it by."""

    name: str
    source: str
    sha: str = field(init=False)

    def __str__(self) -> str:
        return self.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


# KEYS: 1 lock, 2 queue, 3 token, 4 names      ARGV: 1 the prefix of keys, 2 the lock's name, 3 and on: below
_LOCK = """
local lock, queue, token, names = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local prefix, name, id = ARGV[1], ARGV[2], ARGV[3]

local function id_of(entry)
  return entry and string.match(entry, '^%S+')
end

local function token_of(entry)
  return string.match(entry, '^%S+ (%d+)')
end

local function grant(id, ttl, record)
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local given = string.format('%.0f', now)
  local last = tonumber(redis.call('GETSET', token, given) or 0)
  if last >= now then
    given = string.format('%.0f', last + 1)
    redis.call('SET', token, given)
  end
  local entry = id .. ' ' .. given .. ' ' .. ttl .. ' ' .. record
  redis.call('SET', lock, entry, 'PX', ttl)
  redis.call('ZADD', names, 0, name)
  return entry
end
"""

# What a lock needs that somebody waits for. Behind the shortcuts: making functions takes time, too.
_QUEUE = """
local function wake(id, ttl)
  redis.call('RPUSH', prefix .. 'wake:' .. id, 1)
  redis.call('PEXPIRE', prefix .. 'wake:' .. id, ttl)
end

-- Give a lock that has no holder to its first live waiter: the new holder's entry, or false.
local function hand_over()
  while true do
    local first = redis.call('LPOP', queue)
    if not first then
      redis.call('ZREM', names, name)
      return false
    end
    local waiter = redis.call('GET', prefix .. 'ticket:' .. first)
    if waiter then
      local ttl, record = string.match(waiter, '^(%d+) (.*)$')
      redis.call('DEL', prefix .. 'ticket:' .. first)
      wake(first, ttl)
      return grant(first, ttl, record)
    end
  end
end

-- The holder's entry, after a lock without holder was given to its first live waiter, or false.
local function settle()
  return redis.call('GET', lock) or hand_over()
end

-- An abandoned queue vanishes, but never before the last of its live waiters. False when there is none.
local function keep_queue(ttl)
  local left = redis.call('PTTL', queue)
  if left < 2 * ttl then
    redis.call('PEXPIRE', queue, 2 * ttl)
  end
  return left ~= -2
end
"""

# ARGV: 3 id, 4 ttl in ms, 5 record
# Returns {token, 0} when id holds the lock, else {false, ms until the holder's ttl is over}.
ACQUIRE = Script(
    "acquire",
    _LOCK
    + """
local ttl, record = ARGV[4], ARGV[5]
local entry = redis.call('GET', lock)
if id_of(entry) == id then
  redis.call('PEXPIRE', lock, ttl)
  redis.call('DEL', prefix .. 'wake:' .. id)
  return {token_of(entry), 0}
end
if not entry and redis.call('EXISTS', queue) == 0 then
  return {token_of(grant(id, ttl, record)), 0}
end
"""
    + _QUEUE
    + """
entry = entry or hand_over() or grant(id, ttl, record)
if id_of(entry) == id then
  redis.call('DEL', prefix .. 'wake:' .. id)
  return {token_of(entry), 0}
end
local ticket = prefix .. 'ticket:' .. id
if redis.call('PEXPIRE', ticket, ttl) == 0 then
  redis.call('SET', ticket, ttl .. ' ' .. record, 'PX', ttl)
  if not redis.call('LPOS', queue, id) then
    redis.call('RPUSH', queue, id)
  end
end
if not keep_queue(ttl) then
  redis.call('RPUSH', queue, id)
  keep_queue(ttl)
end
return {false, redis.call('PTTL', lock)}
""",
)

# ARGV: 3 id.  Returns 1, or 0 when id did not hold the lock.
RELEASE = Script(
    "release",
    _LOCK
    + """
if id_of(redis.call('GET', lock)) ~= id then
  return 0
end
redis.call('DEL', lock)
if redis.call('EXISTS', queue) == 0 then
  redis.call('ZREM', names, name)
  return 1
end
"""
    + _QUEUE
    + """
hand_over()
return 1
""",
)

# ARGV: 3 id.  Ends holding and waiting alike.
LEAVE = Script(
    "leave",
    _LOCK
    + _QUEUE
    + """
if id_of(redis.call('GET', lock)) == id then
  redis.call('DEL', lock)
else
  redis.call('LREM', queue, 0, id)
end
redis.call('DEL', prefix .. 'ticket:' .. id, prefix .. 'wake:' .. id)
settle()
return 1
""",
)

# ARGV: 3 id, 4 ttl in ms.  Returns 2 when id holds the lock, 1 when it waits, 0 when it is not there.
# Adds nobody to the queue: a beat that arrives after its ticket left changes nothing.
BEAT = Script(
    "beat",
    _LOCK
    + _QUEUE
    + """
if id_of(redis.call('GET', lock)) == id then
  redis.call('PEXPIRE', lock, ARGV[4])
  return 2
end
keep_queue(ARGV[4])
return redis.call('PEXPIRE', prefix .. 'ticket:' .. id, ARGV[4])
""",
)

# ARGV: 3 token.  Returns 1, or 0 when the lock was not held under that token.
EVICT = Script(
    "evict",
    _LOCK
    + _QUEUE
    + """
local entry = redis.call('GET', lock)
if not entry or token_of(entry) ~= ARGV[3] then
  return 0
end
redis.call('DEL', lock)
hand_over()
return 1
""",
)

# Returns the holder's entry, or nil.
HOLDER = Script("holder", _LOCK + _QUEUE + "return settle()\n")

# Returns {the holder's entry or false, the ticket of each live waiter ...}.
QUEUE = Script(
    "queue",
    _LOCK
    + _QUEUE
    + """
local found = {settle()}
for _, waiting in ipairs(redis.call('LRANGE', queue, 0, -1)) do
  local waiter = redis.call('GET', prefix .. 'ticket:' .. waiting)
  if waiter then
    found[#found + 1] = waiter
  end
end
return found
""",
)

# KEYS: 1 cell, 2 watch      ARGV: 1 prefix, 2 "1" when something is expected, 3 what, 4 value
# Returns what stands afterwards, or nil.
COMPARE_AND_SET = Script(
    "compare_and_set",
    """
local stands = redis.call('GET', KEYS[1])
if stands ~= (ARGV[2] == '1' and ARGV[3]) then
  return stands
end
redis.call('SET', KEYS[1], ARGV[4])
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  redis.call('RPUSH', ARGV[1] .. 'wake:' .. id, 1)
  redis.call('PEXPIRE', ARGV[1] .. 'wake:' .. id, 10000)
end
redis.call('DEL', KEYS[2])
return ARGV[4]
""",
)

# KEYS: 1 cell, 2 watch, 3 wake      ARGV: 1 id, 2 for how many ms it will wait; 0 when no longer
# Returns the value, or nil after having noted that id waits for one.
WATCH = Script(
    "watch",
    """
local stands = redis.call('GET', KEYS[1])
if stands or ARGV[2] == '0' then
  redis.call('SREM', KEYS[2], ARGV[1])
  redis.call('DEL', KEYS[3])
  return stands
end
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('PTTL', KEYS[2]) < 2 * ARGV[2] then
  redis.call('PEXPIRE', KEYS[2], 2 * ARGV[2])
end
return false
""",
)
